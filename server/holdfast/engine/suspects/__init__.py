"""Which request ended an engine, and would end the next one as well?

Runs in the front end.

    presence         the requests that an engine had when it died
    departed         those that had left before
    blame            which of them ended it
    convictions      what follows for it, and for its key
    digests          by what another request like it is known
    trials           suspects, in the order in which the next engine gets them
    trial_runner     has the next engine try each of them alone
    suspicions       what ended engines, and for how long that is remembered
    suspicion_files  share it between servers
"""
