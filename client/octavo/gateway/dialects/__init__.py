"""Other APIs than OpenAI's older ones: each has bodies that become chats, and a writer of what comes."""
