"""What does a server show of itself? The status page, its stream and what happened lately.

Runs in the front end; `screen`, `cells` and `patch` also run in `holdfast top`.

    page              makes all of these for one server
    timeline, curves  what happened in the last 24 hours, and the numbers of the last hour
    history           records both, with and without viewers
    activity          what a start does now, as `telemetry.progress` is told
    request_table     the running requests, with their speed
    sources           what else the page is told, and how cheaply
    wall_clock        writes monotonic times as times of day
    document, patch   everything as one JSON document, and how it changed
    feed, stream      one producer for all viewers, and its route `/statusz/stream`
    shell, static/    the page itself, at `/ui`
    screen, cells     the same as text, for `holdfast top`
    text              that text for all that `curl /ui`
"""
