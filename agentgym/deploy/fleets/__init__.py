"""Fleets of environment servers on a cluster: the parts that agentgym/deploy/kubernetes.py joins.

startup      bring servers up, find the reason why a pod is not ready, take servers down
preflight    find what a cluster lacks before anything is sent
fleet_lease  record the run that a fleet belongs to, and see if that run lives
addresses    publish the servers' current addresses for a run's clients
upkeep       keep lease and addresses up to date while a run plays, and stop it at too many pods
"""
