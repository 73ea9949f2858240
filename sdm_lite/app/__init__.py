"""The command line: train, recall, generate, demo, doctor (torch, rich, matplotlib and safetensors; extra ``cli``)."""
