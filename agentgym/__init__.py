"""The library: rollouts, algorithms, training, evaluation, state.
It knows nothing of Prefect or DVC.
"""
