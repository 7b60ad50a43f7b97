"""The OpenAI-compatible chat endpoint: starlette on uvicorn.

Turns HTTP requests into GenerationRequests and token events into OpenAI responses. Knows the pod
only through `station.backend.ChatBackend`; decides nothing about admission, placement or tokens.
"""
