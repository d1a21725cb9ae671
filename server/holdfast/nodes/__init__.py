"""How do several nodes run one engine? The head hands out generations, and followers run them.

The head is the front end of `serve`. A follower is a process of its own on each other node, without
vLLM, which outlives the engines that it starts. Each follower keeps one authenticated connection to
the head; what crosses it is not secret unless it is TLS, but can be neither forged nor repeated.

    head              what the head does: who joins, which generation runs, when it ends
    follower          what a follower does: when it connects, starts and stops the engine
    channel           one side of a connection: proof of the key, heartbeats, messages
    actions           what these two ask their caller to do
    messages          what the two say to each other
    strict_json       how that is written, and read without trust
    frames            where a message ends, and whether the peer sent it
    proof             the shared key: its file, and what both ends derive from it
    facts             what has to be equal on all nodes, and the line that says what is not
    ranks             statistics of ranks on another node
    streams           bytes between a socket and a channel
    listener          the head's port: sockets, deadlines and limits around `head`
    engine_processes  the processes of one generation on a follower: started, watched, ended
    dialer            the follower's connection: sockets, deadlines and engine around `follower`

`head`, `follower` and `channel` are pure: events and the time go in, actions come out. So every
interleaving of losses, delays and ends can be tested. `listener` and `dialer` carry the actions
out, `engine_processes` those about the engine. No command uses them yet.
"""
