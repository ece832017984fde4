"""Steps of a run before its first stage."""

BEFORE = ("prepare", "demonstrate", "initialize", "warm-start")
BEFORE_AND_EVALUATED = (*BEFORE[:3], "evaluate-initialize", "warm-start", "evaluate-warm-start")
