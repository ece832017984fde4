"""Fleets of environment servers on a cluster: the parts that agentgym/deploy/kubernetes.py joins.

startup      bring servers up, tell which pod is not ready and why, take them down
preflight    what a cluster lacks, before anything is sent
fleet_lease  which run a fleet belongs to, and whether that run lives
addresses    where the servers are now, for the pools of a run
upkeep       lease, addresses and breaker while a run plays
"""
