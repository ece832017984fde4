"""Prefect reads its settings when it is first imported; importing our package before says where
its state lies.
"""

import services  # noqa: F401
