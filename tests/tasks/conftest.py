"""Prefect reads its settings at its first import; import our package before, because it sets the
location of Prefect's state.
"""

import tasks  # noqa: F401
