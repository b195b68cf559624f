"""`RunAheadMiddleware`: starts the agent's next tool calls before the model has asked for them.

The pure parts are in `precedent_run_ahead.actions`; here is what knows LangChain: which tools and which middleware
allow it, how a call runs ahead, and what the model says while it writes. Nothing here decides what an agent answers.
"""

from precedent_run_ahead.middleware import RunAheadMiddleware
from precedent_run_ahead.read_only import read_only

__all__ = ["RunAheadMiddleware", "read_only"]
