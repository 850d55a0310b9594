"""The fleet beyond saturation, in virtual time: does the order of the queue hold, and does goodput?"""
