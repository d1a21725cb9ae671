"""The requests of an engine: what is known of each, and when each gets its turn.

Runs in the front end.

    arrivals          makes a request of a call, with an ID by which it is found
    request           one request: its turn, and counts of lost ones
    sizes             how large prompts are
    sequence_queue    which sequence the engine gets next
    long_prompts      which prompts give way while the host is short of memory
    load              how many requests the engine has
    request_progress  how far each has come
    unread_tokens     what the engine has done for requests whose callers left
    observed_outputs  reads what the engine sends before vLLM does
    missing_vectors   ends the pooling requests for which the engine has no vector
    continuation      lets an engine go on with an answer that another one began
    aborts            tells an abort that was asked for from one by an engine that ends
"""
