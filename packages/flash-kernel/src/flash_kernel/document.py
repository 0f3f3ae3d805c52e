"""What commands write into documents lies between two markers, and is never edited by hand."""


def replaced(document: str, text: str, markers: tuple[str, str]) -> str:
    """Return a document with another text between its markers.

    Raises:
        ValueError: The markers are not there, once each and in order.
    """
    begin, end = markers
    if document.count(begin) != 1 or document.count(end) != 1:
        msg = f"the document must have the markers {begin} and {end} once each."
        raise ValueError(msg)
    before, rest = document.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{after}"
