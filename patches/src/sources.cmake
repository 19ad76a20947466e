# Adds the C++ files of MANIFEST (a copy of it is in this folder) to libllama. llama.cpp's src/CMakeLists.txt includes this.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/MANIFEST" kvtool_sources REGEX "^src/.*[.]cpp$")
list(TRANSFORM kvtool_sources REPLACE "^src/" "kvtool/")
list(APPEND LLAMA_CORE_SOURCES ${kvtool_sources})
# an #include names a file of another folder as folder/file
include_directories("${CMAKE_CURRENT_LIST_DIR}")
