"""Is what a server answers right? `holdfast verify URL`, against any OpenAI-compatible server.

Runs in a process of its own, on any machine that reaches the server, and so do `checks` and
`report`. The front end itself compares with a baseline by `agreement` and `baseline`, and shows the
verdict of a run with `records`; `holdfast doctor` reads answers by `answers`.

    command          the flags, the order, the exit code
    runner           runs the checks in order, and decides their statuses and the verdict
    check            a check, and what it needs before it can be made
    target           the server over HTTP: every wait has a deadline
    waiting          waits for a server that limits its requests
    survey           what the server is: models, versions, and with Holdfast its status
    abilities        what the server can do, and what it says of the rest
    naming           under which names it takes the fields of a request
    denials          does it say that it takes no functions or chats, or does it take them and fail?
    vitals           what `/metrics` says of a server: memory, requests, deaths
    course           what became of Holdfast's engines during the run
    trial            what a check is given: it asks the server, and notes numbers and faults
    options          what a user asks of the checks; `tasks` reads the file of a user's own
    soak_plan        how long a soak lasts: `--hours`
    baseline         the file of --record and --against, and how far a score may fall behind it
    scoring          log-probs of token sequences, in the ways that vLLM offers
    agreement        do two of them agree, within noise that was measured?
    recorder         what becomes of the files of --record and --against
    directories      makes the directories that a run writes to when it is over
    streams          a stream of server-sent events, byte by byte
    answers          reads values out of answers that may have any shape
    packages         which packages of the extra `verify` are here
    other_tools      runs two of them in a process of its own, which reaches only the server
    other_programs   runs lm-eval, guidellm and aiperf, if they are installed
    tokenizer_files  where on this machine is the tokenizer that they need?
    texts            changes every text of a record, however deep
    redaction        takes keys out of what is written
    records          what a report is made of
    checks/          the checks, one module a group; `checks/__init__.py` lists them all
    report/          writes the report: JSON, Markdown, HTML, JUnit, in-toto
    page             has a server show the verdict on its status page
    progress         shows on a terminal or in a pipe what happens
    interruption     Ctrl-C and SIGTERM
    diff             `holdfast verify diff A B`; `comparison` compares the reports

To add a group: write `checks/NAME.py` with a tuple `CHECKS` of `Check`, and add the tuple to `ALL`
in `checks/__init__.py`. Each check has a row in `docs/verifying.md`, and a defect of
`tests/support/openai_double.py` that it finds and no other check does. A check is a coroutine
function that gets a `Trial`:

    async def capital(trial: Trial) -> None:
        answer = await trial.chat("What is the capital of France?", max_tokens=32)
        trial.require("Paris" in answer.content(), "the answer does not name Paris", answer)

It fails if it notes a fault or a number beyond its limit. What it raises counts as follows:
`SkippedError` as skipped, or as inconclusive if a flag asks for the check, `InconclusiveError` and
an answer that is not whole as inconclusive, a status other than 200 that it did not expect and a
deadline as failed.
"""
