"""The Grafana dashboards, as typed code: `python -m dashboards` writes `dashboards/generated`.

1. `queries` knows how a query names what it wants: the variables, a guarded division.
2. `workspace`, `lifecycle` and `serving` say what is shown, as data: rows of `panels.Panel`.
3. `panels` makes Grafana's panels of them, `frame` the page around them.
"""
