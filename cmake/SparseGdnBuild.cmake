# Settings every room shares: language, warnings, sanitizer, output folders, CUDA, versions.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # Paths relative to the source tree: a second checkout of the same commit builds from the cache.
  set(ccache_launcher "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}"
      CCACHE_NOHASHDIR=1 "${CCACHE_PROGRAM}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${ccache_launcher}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${ccache_launcher}")
endif()

# Selection masks must agree bit for bit between backends, so contraction is off everywhere and
# fast-math is never used; kernels that want FMA ask for it with intrinsics.
add_library(sparsegdn_build_flags INTERFACE)
add_library(sparsegdn::build_flags ALIAS sparsegdn_build_flags)
target_compile_options(sparsegdn_build_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-sign-compare -ffp-contract=off>)

if(SPARSEGDN_SANITIZER)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SPARSEGDN_SANITIZER}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=${SPARSEGDN_SANITIZER})
endif()

set(SPARSEGDN_HAVE_CUDA OFF)
if(NOT SPARSEGDN_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Archs are set per target (90a next to 80); CMake 3.25 has no CUDA_STANDARD 20 for nvcc 13,
    # so the standard is passed as an option.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(SPARSEGDN_HAVE_CUDA ON)
    target_compile_options(sparsegdn_build_flags INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -Werror=all-warnings -fmad=true>)
  elseif(SPARSEGDN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SPARSEGDN_CUDA=ON, but no CUDA compiler was found")
  endif()
endif()
message(STATUS "CUDA backend: ${SPARSEGDN_HAVE_CUDA}")

find_package(Git QUIET)
set(SPARSEGDN_COMMIT "unknown")
if(GIT_FOUND)
  execute_process(COMMAND "${GIT_EXECUTABLE}" -C "${CMAKE_SOURCE_DIR}" rev-parse --short=12 HEAD
                  OUTPUT_VARIABLE SPARSEGDN_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
                  RESULT_VARIABLE git_result)
  if(NOT git_result EQUAL 0)
    set(SPARSEGDN_COMMIT "unknown")
  endif()
endif()

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
