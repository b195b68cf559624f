"""The server: OpenAI's HTTP interface over engines, who may use it, and a page to look at it.

It loads and decodes nothing itself: the engines do. Nothing but `cli` may import it. Types of the protocol are the
`openai` package's own.
"""
