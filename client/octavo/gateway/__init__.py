"""The OpenAI HTTP API over `octavo.v1`: a translation without state, in front of any number of schedulers."""
