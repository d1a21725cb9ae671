"""Elements of HTML and SVG; what stands in them is escaped by the standard library."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from holdfast.verify.answers import printable


def tag(name: str, /, *content: Element | str, **attributes: str | float) -> Element:
    """An element. `class_` is `class`, and `stroke_width` is `stroke-width`."""
    element = Element(name)
    for key, value in attributes.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        element.set(key.rstrip("_").replace("_", "-"), printable(shown))
    for part in content:
        if not isinstance(part, str):
            element.append(part)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + printable(part)
        else:
            element.text = (element.text or "") + printable(part)
    return element


def html(element: Element) -> str:
    """The text of an element, as HTML has it: `<br>` and not `<br />`."""
    text: str = tostring(element, encoding="unicode", method="html")
    return text
