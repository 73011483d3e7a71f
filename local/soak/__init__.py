"""`tideline soak`: a platform that runs for long; does it keep up?"""
