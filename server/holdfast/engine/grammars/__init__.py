"""Grammars of clients (`response_format`, tools, `structured_outputs`), first tried elsewhere.

vLLM compiles a grammar in the front end, to check it, and in EngineCore, to use it, with native
code that a client can crash, or keep busy for hours. So each is compiled first by a process that
may die, with a limit of time and of memory, and only what survived goes on; the rest is a 400.

    checked        what becomes of a grammar: known, tried, refused; put into the request
    lanes          which key's grammar is tried next
    pool           the front end's side of the processes that try
    processes      their side: one that has the tokenizer, and the workers that it forks
    compiling      what a worker does with a grammar: as vLLM's front end and EngineCore would
    compile_limit  how long EngineCore may compile what was let through
    requests       what vLLM compiles in the front end before a request has parameters
"""
