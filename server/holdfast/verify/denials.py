"""Does a server say that it takes no functions or no chats, or does it take them and fail?"""

from __future__ import annotations

import re

_TOOLS = r"(?:tools?|tool[ _-]?(?:use|calls?|calling)|function[ _-]?call(?:s|ing)?|functions)"
_NO_TOOLS = re.compile(
    r"\btools param requires\b"
    rf"|\b{_TOOLS} (?:is |are )?not (?:supported|enabled|available|allowed)\b"
    rf"|\b{_TOOLS} (?:is |are )?(?:unsupported|disabled)\b"
    rf"|(?:\bnot|n't|\bcannot) support (?:\w+ )?{_TOOLS}\b"
    rf"|\bno \w+ (?:\w+ )?(?:that )?supports? {_TOOLS}\b"
    rf"|\bunsupported (?:\w+:? )?[`'\"]?{_TOOLS}(?![\w\[.])",
    re.IGNORECASE,
)
_FAILURE = re.compile(
    r"templat|render|grammar|filter|operator|operand|backend|schema|pars(?:er|ing)", re.IGNORECASE
)
"""Words of what fails where functions are taken, in an error that could be read as a denial."""


_NO_CHATS = re.compile(
    r"\b(?:no|without|missing|provide|requires?|sets?|defines?) (?:\w+ ){0,3}(?:chat_)?template\b"
    r"|(?:\bnot|n't) have (?:\w+ ){0,3}(?:chat_)?template\b"
    r"|\b(?:chat_)?template (?:is |was |has )?(?:not|missing|required|undefined)\b"
    r"|\btemplate error: template not found\b"
    r"|(?:\bnot|n't|\bcannot) support (?:the |this )?chats?\b"
    r"|\bchats?(?: completions?)? (?:api |endpoint )?(?:is |are )?"
    r"(?:not (?:supported|enabled|available)|disabled)\b"
    r"|\bnot a chat model\b",
    re.IGNORECASE,
)
_OTHER_REASON = re.compile(r"render|fail|temperature|max_\w*tokens", re.IGNORECASE)
"""Words of what is wrong with one chat, in an error that could be read as a denial of any."""


def denies_chats(said: str) -> bool:
    """Whether an error says that the model takes no chats, such as one without a template."""
    return _NO_CHATS.search(said) is not None and _OTHER_REASON.search(said) is None


def denies_tools(said: str) -> bool:
    """Whether an error says that the server takes no functions."""
    return _NO_TOOLS.search(said) is not None and _FAILURE.search(said) is None
