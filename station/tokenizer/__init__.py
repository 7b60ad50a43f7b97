"""Text to token ids and back: the vocabulary, Kimi-K3's chat format, and the reply parser.

Knows nothing of HTTP, of the model's tensors or of the pod. Everything here is a pure function or a
small state machine; the only input from outside is the vocabulary file.
"""
