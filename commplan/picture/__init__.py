"""Backwards as a page for people: `content` puts predictions and measurements side by side, `page` writes the HTML."""

from commplan.picture.content import Content, Section, content
from commplan.picture.writing import MAX_BYTES, Page, TooLargeError, page

__all__ = ["MAX_BYTES", "Content", "Page", "Section", "TooLargeError", "content", "page"]
