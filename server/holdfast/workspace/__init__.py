"""Where does scratch memory come from, and when may it grow?

Runs in each worker; the front end reads `stats`, `plan` and `learned_store`.
"""
