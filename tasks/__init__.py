"""Thin Prefect tasks: retries, a timeout and an artifact around one library call each."""
