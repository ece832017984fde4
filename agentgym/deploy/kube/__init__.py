"""Client of a cluster's API server; only this folder needs the package `kubernetes`, which the
extra `cluster` installs.

client       apply, create, get, list, patch, delete, watch: each with a deadline
calls        attempts of one call, and errors of the API server, each as one sentence
credentials  identity: a kubeconfig, or the account of this pod; read again after a refusal
"""
