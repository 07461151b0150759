from mission_control.cli import main

main()
