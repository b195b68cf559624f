"""Running tools ahead: predicts an agent's next calls, prices them, and keeps their results until they are asked for.

Pure parts, without torch and without LangChain; `precedent_run_ahead` is the middleware on top. It decides
nothing about an answer: a result is handed over only for an equal call, and everything else is thrown away.
"""
