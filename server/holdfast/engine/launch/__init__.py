"""Starts an engine: from the command line to one generation after another.

Runs in the front end, except `node_ranks` and `node_executor`, which run a follower's ranks in a
process of its own. What these import runs there too.

    late_engine    the engine before and after vLLM is imported
    arguments      the command line, by vLLM's own parser
    configure      the configuration and the launcher that follow from it
    launcher       starts one generation after another
    startup        one start, and why it fails
    construction   vLLM's constructor, in a thread
    hung_start     notices a start that hangs
    device_memory  waits for the memory of the engine before
    head_node      which other nodes may join, and what each is told
    node_ranks     the process of a follower's ranks
    node_executor  runs them there
"""
