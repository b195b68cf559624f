"""The server: OpenAI's HTTP interface over engines, and who may use it.

It loads and decodes nothing itself: the engines do. Nothing but `cli` may import it.
"""
