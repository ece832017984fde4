"""Fleets of environment servers on a cluster: the parts that agentgym/deploy/kubernetes.py joins.

readiness   which pod is not ready, and why
preflight   what a cluster lacks, before anything is sent
lease       which run a fleet belongs to, and whether that run lives
addresses   where the servers are now, for the balancer
"""
