"""Verbs that train nothing: what there is, what this machine can do, a project to start from."""
