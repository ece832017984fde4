"""Prefect reads its settings when it is first imported; importing our package before says where
its state lies.
"""

import tasks  # noqa: F401
