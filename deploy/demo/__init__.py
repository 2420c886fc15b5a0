"""The demo: a third-party agent learns a small task while the weights behind it are swapped."""
