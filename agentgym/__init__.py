"""The library: rollouts, algorithms, training, evaluation, state.
It imports neither Prefect nor DVC.
"""
