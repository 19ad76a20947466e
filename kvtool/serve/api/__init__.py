"""The APIs of OpenAI and Anthropic: fields of requests, and bodies of answers.

All functions that check a part of a request raise ApiError if it is wrong.
"""
