"""Where does scratch memory come from, and when may it grow?

Runs in each worker. The front end and a follower read what a rank has written into `stats`; the
front end also has `plan` and `learned_store`, before and between engines.

    plan             how large is each workspace, and why? arithmetic on bytes
    reservers/       what will a model need?
    learned_store    what did an earlier run need?
    manager, growth  vLLM's workspace manager, with a policy; the rules of growth
    buffers          the scratch buffer of each slot, and the views into it
    resources        what layers keep besides scratch; `moe_permute` is such a resource
    accounting       what a manager did and holds
    memory_ledger    where did the memory of a rank go?
    stats/           what a rank counts, in a file that outlives it
"""
