"""Which model does the engine serve, and of what files is it made?

Runs in the front end; `facts` and `model_files` also run in the process of a follower's ranks.

    facts        what probe and supervisor need to know of its configuration
    identity     which files the model is, and what the engine runs on
    model_files  the files that the command line names: template, adapters, tokenizer, weights
"""
