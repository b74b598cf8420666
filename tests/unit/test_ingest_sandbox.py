"""A template that is rendered faster sees what it saw."""

from __future__ import annotations

import pytest
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import _compile_jinja_template

from services.ingest.sandbox import quicken


def test_keys_are_found_attributes_come_before_them_and_what_is_unsafe_stays_out() -> None:
    text = "{{ m.role }} {{ m.items is callable }} {{ m.get('role') }} {{ m.none is defined }} {{ m['items'] }}"
    message = {"role": "user", "items": "goods"}
    before = _compile_jinja_template(text).render(m=message)
    quicken([text, unsafe := "{{ m.__class__.__mro__ }}"])
    assert _compile_jinja_template(text).render(m=message) == before == "user True user False goods"
    with pytest.raises(SecurityError):
        _compile_jinja_template(unsafe).render(m=message)
