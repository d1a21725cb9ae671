"""Is what a server answers right? `holdfast verify URL`, against any OpenAI-compatible server.

Runs in a process of its own, on any machine that reaches the server. The server itself compares
with a baseline by `agreement` and `baseline`, and `holdfast doctor` reads answers by `answers`.

command.py   the flags, the order, the exit code
runner.py    makes the checks one after the other; no check can end the run
target.py    the server over HTTP: every wait has a deadline
survey.py    what the server is: models, abilities, versions, and with Holdfast its status
vitals.py    what `/metrics` says of a server's health
course.py    what became of Holdfast's engines during the run
trial.py     what a check is given: it asks the server, and notes numbers and faults
options.py   what a user asks of the checks
soak_plan.py how long a soak lasts: `--hours`
baseline.py  the file of --record and --against, and how far a score may fall behind it
scoring.py   log-probs of token sequences, in the ways that vLLM offers
agreement.py do two of them agree, within noise that was measured?
recorder.py  what becomes of the files of --record and --against
streams.py   a stream of server-sent events, byte by byte
answers.py   reads values out of answers that may have any shape
packages.py  which packages of `holdfast[verify]` are here
other_tools.py  runs two of them in a process of its own, which reaches only the server
redaction.py takes keys out of what is written
records.py   what a report is made of
checks/      the checks, one module a group; `checks/__init__.py` lists them all
report/      writes the report: JSON, Markdown, HTML, JUnit, in-toto
progress.py  shows on a terminal or in a pipe what happens
interruption.py  Ctrl-C and SIGTERM
diff.py      `holdfast verify diff A B`; comparison.py compares the reports

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
