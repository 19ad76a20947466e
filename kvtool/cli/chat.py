def chat(): pass
