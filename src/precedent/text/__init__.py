"""Text at both ends of a request: messages to prompt ids, token ids to text and tool calls."""
