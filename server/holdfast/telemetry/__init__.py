"""What does the server say? Metrics, logs and the progress of a start.

Runs in the front end; `collector`, `counters` and `logs` also run in a follower.
"""
