"""How do several nodes run one engine? The head hands out generations, and followers run them.

The head is the front end of `serve`. A follower is a process of its own on each other node, without
vLLM, which outlives the engines that it starts. Each follower keeps one authenticated connection to
the head; what crosses it is not secret unless it is TLS, but can be neither forged nor repeated.

    head              what the head does: which nodes join, which generation runs, when it ends
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
    generations       the head as the launcher uses it: each generation on all nodes
    remote_ranks      the ranks of one generation on other nodes, and which death came first
    handed_flags      which flags of the head the ranks on other nodes get
    addresses         which address and interface lead to another node
    listener          the head's port: sockets, deadlines and limits around `head`
    engine_processes  the processes of one generation on a follower: started, watched, ended
    memory            what ends them before the follower's host runs out of memory
    dialer            the follower's connection: sockets, deadlines and engine around `follower`
    command_line      what `holdfast follow` is given
    credentials       the files of key and TLS that both are given

`head`, `follower` and `channel` are pure: events and the time go in, actions come out. So every
interleaving of losses, delays and ends can be tested. `listener` and `dialer` carry the actions
out, `engine_processes` those about the engine. `holdfast follow` runs a follower; `holdfast serve
--nnodes` runs a head, whose launcher starts each generation here too.
"""
