"""Fetches and decodes the media of requests within bounds.

Runs in the front end.

    budgets       what the media of a request may take
    limits        how many pixels a request, and all requests, may hold once decoded
    formats       which formats reach a decoder, and how it reads clips
    clips         how many frames of a clip are decoded
    public_fetch  fetches URLs from public addresses only
    realtime      how much audio of realtime transcriptions may wait
"""
