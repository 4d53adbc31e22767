"""Prebook's KV connector for vLLM: prefill pushes KV blocks into blocks that decode booked in advance.

The package is copied next to a stock vLLM (see :mod:`prebook_connector.install`) and imports nothing that vLLM
does not already bring along. Importing this module must stay cheap and must not import vLLM: the dispatcher, the
drain hook and the installer run without the engine.
"""

PROTOCOL_VERSION = 1
"""Version of the messages in :mod:`prebook_connector.protocol`; part of the compatibility hash of a pair."""
