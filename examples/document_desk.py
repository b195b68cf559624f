"""Drafting with an empty cache: an agent on a document store, with and without response templates.

    python examples/document_desk.py

The agent has four actions: open, edit, delete and share a document. The tools' schemas give the form of the tool calls,
the templates below give the wording of the confirmations, and the live prompt holds the values to fill in. No answer is
canned: the model writes every token itself, and a template only proposes.

A model of 135 million parameters does not choose tools by itself, so a scripted customer leads it: each message says
which call comes next. If the model does not make the call, the customer makes it and shows the result.
"""

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, field

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from rich.console import Console
from rich.progress import track
from rich.table import Table

from precedent import ChatPrecedent, Templates

MODEL = "smollm2-135m-instruct"  # or any Hugging Face id or folder
DTYPE = "float32"  # bfloat16 is faster if the processor supports it, but its rounding sometimes tips a near-tie
SYSTEM = "You are the assistant of a document store. Repeat tool calls exactly. Answer questions in one short sentence."
TEMPLATES = Templates(
    [
        "Document {document_id} is {state}.",
        "Document {document_id} is now {state}.",
        "Document {document_id} is shared with {email}.",
        "Document {document_id} now reads '{content}'",
    ],
    choices={"state": ["open", "changed", "deleted", "shared"]},
)
MODES = {  # the drafters of each mode; the cache is always empty
    "plain": (),
    "templates": ("template",),
    "prompt": ("prompt",),
    "both": ("prompt", "template"),
}
CAPTION = (
    f"{MODEL}, {DTYPE}, greedy. tok/step: tokens per forward pass; templates, prompt: share of the tokens accepted "
    "from each; decode: seconds without prefill; same: turns equal to plain decoding; calls: tool calls that the model "
    "made itself"
)


class DocumentStore:
    """A few documents in memory, and the tools for them."""

    def __init__(self) -> None:
        self.rows = sqlite3.connect(":memory:", check_same_thread=False)
        self.rows.execute("CREATE TABLE documents (document_id TEXT PRIMARY KEY, content TEXT, shared_with TEXT)")
        documents = [("D-104", "Opening hours"), ("D-233", "Price list"), ("D-377", "Old menu"), ("D-518", "Rota")]
        self.rows.executemany("INSERT INTO documents VALUES (?, ?, '')", documents)

    def change(self, statement: str, *values: str) -> str:
        """Run a statement on one document (its id is the last value) and show the resulting row."""
        if not self.rows.execute("SELECT 1 FROM documents WHERE document_id = ?", values[-1:]).fetchone():
            return json.dumps({"error": f"there is no document {values[-1]}"})
        self.rows.execute(statement, values)
        row = self.rows.execute("SELECT * FROM documents WHERE document_id = ?", values[-1:]).fetchone()
        shown = dict(zip(("document_id", "content", "shared_with"), row, strict=True)) if row else {}
        return json.dumps({"document_id": values[-1], **shown, "state": "ok" if row else "deleted"})

    def tools(self) -> dict[str, BaseTool]:
        """The four actions by name (with the tools in this order the small model makes every call)."""

        @tool
        def open_document(document_id: str) -> str:
            """Open a document."""
            return self.change("SELECT content FROM documents WHERE document_id = ?", document_id)

        @tool
        def edit_document(document_id: str, content: str) -> str:
            """Replace the text of a document."""
            return self.change("UPDATE documents SET content = ? WHERE document_id = ?", content, document_id)

        @tool
        def delete_document(document_id: str) -> str:
            """Delete a document."""
            return self.change("DELETE FROM documents WHERE document_id = ?", document_id)

        @tool
        def share_document(document_id: str, email: str) -> str:
            """Share a document with a person."""
            return self.change("UPDATE documents SET shared_with = ? WHERE document_id = ?", email, document_id)

        actions = (edit_document, delete_document, share_document, open_document)
        for action in actions:
            action.handle_validation_error = True  # missing arguments become a tool answer, not an exception
        return {action.name: action for action in actions}


@dataclass
class Errand:
    """One request of the customer: the words, the call that fulfils it, and the expected confirmation."""

    wish: str
    name: str
    arguments: dict[str, str]
    confirmation: str

    @property
    def lines(self) -> tuple[list[str], list[str], list[str]]:
        """The customer's messages before each of the assistant's three turns."""
        call = json.dumps({"name": self.name, "arguments": self.arguments})
        lead = f"Repeat this tool call:\n<tool_call>\n{call}\n</tool_call>"
        return (
            [self.wish, lead],
            [f"Repeat this sentence:\n{self.confirmation}"],
            ["Thank you. What is the id of the document? Answer in one short sentence."],
        )


ERRANDS = (
    Errand("Please open document D-233.", "open_document", {"document_id": "D-233"}, "Document D-233 is open."),
    Errand(
        "Please share document D-518 with ben@example.com.",
        "share_document",
        {"document_id": "D-518", "email": "ben@example.com"},
        "Document D-518 is shared with ben@example.com.",
    ),
    Errand("Please delete document D-377.", "delete_document", {"document_id": "D-377"}, "Document D-377 is deleted."),
    Errand(
        "Please put 'Closed on Monday.' into document D-104.",
        "edit_document",
        {"document_id": "D-104", "content": "Closed on Monday."},
        "Document D-104 is changed.",
    ),
)


@dataclass
class Figures:
    """What one mode took for all errands."""

    answers: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    calls_made: int = 0

    def add(self, answer: AIMessage) -> None:
        """Count one turn of the assistant."""
        speculation = answer.response_metadata["speculation"]
        self.answers.append(
            (str(answer.content), json.dumps([[call["name"], call["args"]] for call in answer.tool_calls]))
        )
        self.tokens += answer.usage_metadata["output_tokens"] if answer.usage_metadata else 0
        self.steps += speculation["num_steps"]
        self.accepted.update(speculation["accepted_by_source"])
        self.seconds += speculation["latency_microseconds"]["request_decode_time"] / 1e6

    def share(self, source: str) -> str:
        """The share of tokens accepted from a source."""
        return f"{100 * self.accepted[source] / self.tokens:.0f} %"


def run(llm: ChatPrecedent, mode: str, errand: Errand, figures: Figures) -> None:
    """Serve one errand on a new store."""
    tools = DocumentStore().tools()
    templates = TEMPLATES if "template" in MODES[mode] else []
    model = llm.bind_tools(list(tools.values()), drafters=MODES[mode], templates=templates)
    messages: list[BaseMessage] = [SystemMessage(SYSTEM)]
    for number, lines in enumerate(errand.lines):
        messages += [HumanMessage(line) for line in lines]
        answer = model.invoke(messages)
        figures.add(answer)
        messages.append(answer)
        made = [(call["name"], call["args"]) for call in answer.tool_calls] == [(errand.name, errand.arguments)]
        figures.calls_made += made
        for call in answer.tool_calls:
            result = tools[call["name"]].invoke(call["args"]) if call["name"] in tools else "There is no such tool."
            messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
        if number == 0 and not made:
            messages.append(HumanMessage(f"The system shows: {tools[errand.name].invoke(errand.arguments)}"))


def report(found: dict[str, Figures]) -> Table:
    """The figures of all modes, compared with plain decoding."""
    plain = found["plain"]
    table = Table(title=f"{len(ERRANDS)} errands at the document desk, empty cache", caption=CAPTION)
    for column in ("drafts", "tok/step", "templates", "prompt", "decode", "speed", "same", "calls"):
        table.add_column(column, justify="left" if column == "drafts" else "right")
    for mode, figures in found.items():
        same = sum(left == right for left, right in zip(figures.answers, plain.answers, strict=True))
        table.add_row(
            *(mode, f"{figures.tokens / figures.steps:.2f}", figures.share("template"), figures.share("prompt")),
            *(f"{figures.seconds:.1f} s", f"{plain.seconds / figures.seconds:.2f}x"),
            *(f"{same}/{len(plain.answers)}", f"{figures.calls_made}/{len(ERRANDS)}"),
        )
    return table


def main() -> None:
    """Run every errand in every mode, interleaving the modes, and print the figures."""
    llm = ChatPrecedent(model=MODEL, dtype=DTYPE, max_tokens=60)
    found = {mode: Figures() for mode in MODES}
    turns = [(errand, mode) for errand in ERRANDS for mode in MODES]
    for errand, mode in track(turns, "serving", console=Console(stderr=True)):
        run(llm, mode, errand, found[mode])
    Console().print(report(found))


if __name__ == "__main__":
    main()
