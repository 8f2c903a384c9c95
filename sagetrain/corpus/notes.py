"""The sentences that `prepare` says about the records and texts that it has read."""

from __future__ import annotations

from collections import Counter

Notes = Counter[tuple[str, str]]
"""The number of records that each note is about. A note is a sentence, and the name of a key if the note is about a
key."""
OTHERS_COUNT = "messages of others than the assistant say that they count, but answers alone do:"
UNREAD = "not read of the records:"
REPEATED = "JSON objects that hold a key twice, of which the last one counts:"
FORGED = (
    "control tokens that are written in messages, tools or documents are these tokens, as in transformers, so that a "
    "text may end its turn or begin another one; take them out of the records unless they are meant:"
)
APART = (
    "answers that would share a token with the end of their prompt, such as a space, are encoded apart from it, "
    "because a model is asked with the prompt alone. Prompts that end before the space, and answers that begin with "
    "it, have the tokens of any text:"
)
UNWRITTEN = "the chat template does not read these keys, so that what records hold there is left out:"
NULLS = (
    "tool calls or tools hold null, which is kept as the JSON has it, as is NaN; a table that was written as JSON has "
    "null where a call has no such argument, and a tool no such key, so give the table itself (.parquet):"
)
QUOTED = (
    "the chat template writes the arguments of tool calls as a quoted text, because the records hold them as JSON "
    "text, and servers such as vLLM hand it an object; give objects (json.loads of the text):"
)
DATED = (
    "the chat template writes the date of the day on which it is used (strftime_now), so that these records hold the "
    "day of this call, and another call or part writes another one; give the records the date that the template takes "
    '({"chat_template_kwargs": {"date_string": ...}} for Llama 3), or write one into a copy of the template:'
)
ENDLESS = (
    "answers that count end with no control token, as in templates whose turns end where the next role begins, so that "
    "nothing teaches the model to stop. Write the token that is to end an answer, such as {{ eos_token }}, behind it "
    "in a copy of the template (inside of {% generation %}, where it has that) and name the copy as the chat template:"
)
WRITTEN = (
    "texts hold control tokens of the tokenizer, and are read with them, as in transformers; to read their characters "
    'instead, write {"split_special_tokens": true} into tokenizer_config.json beside the tokenizer:'
)
UNKNOWN = (
    "characters or words that the tokenizer has no token for are its unknown token, so that a model can neither read "
    "nor write them; take a tokenizer that spells them in bytes, or leave such texts out:"
)
NOTHING = (
    "the chat template writes nothing in the place of what it looks up in vain, such as a special token that the "
    "tokenizer lacks, or a role that it does not know:"
)
