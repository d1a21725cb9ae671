"""How much memory does the host have left, and when must the engine give way?"""
