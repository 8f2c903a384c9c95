"""The engine on DeepSpeed's ZeRO. Its keys and rules are in config/rules/engine.py, its memory and time in
costs/deepspeed_prices.py, and what it does when in config/layout.py."""
