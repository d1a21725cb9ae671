"""How the front end fetches and decodes the media of requests, within bounds.

Runs in the front end.
"""
