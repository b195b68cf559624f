"""OpenAI's HTTP interface over engines, and a page to look at them.

It may use every other room but the command line, which starts it; nothing else may import it. Protocol types are the
`openai` package's own.
"""
